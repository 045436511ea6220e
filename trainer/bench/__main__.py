"""``python -m trainer.bench``: the model's speed beside transformers'."""

from trainer.bench.model import main

if __name__ == "__main__":
    main()
