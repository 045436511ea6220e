"""Entry point of ``python -m trainer.bench``, which compares the model's speed with transformers'."""

from trainer.bench.model import main

if __name__ == "__main__":
    main()
