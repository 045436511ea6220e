"""Draw new masks in every epoch. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from data_prep.draws import bits
from data_prep.manifest import Manifest
from data_prep.masking import Masking, Vocabulary, make_vocabulary
from data_prep.tokenizer import Tokenizer

_MASKS = 4  # the purpose of this random stream; see trainer/data/order.py


@dataclass(frozen=True)
class DynamicMasks:
    """Settings for drawing new masks."""

    vocabulary: Vocabulary
    masking: Masking
    seed: int

    @property
    def keeps_counts(self) -> bool:
        """Whether new masks cover as many tokens as the static ones, whose number is in the index."""
        return self.masking.unit == "token"


def dynamic_masks(tokenizer: Tokenizer, manifest: Manifest, seed: int) -> DynamicMasks:
    """Return the settings for drawing new masks over the data set."""
    settings, specials = manifest.settings, manifest.tokenizer.specials
    vocabulary = make_vocabulary(manifest.tokenizer.vocab_size, tokenizer.never, specials.mask)
    masking = Masking(settings.masking, settings.masked_share, settings.max_predictions)
    return DynamicMasks(vocabulary, masking, int(bits(seed, _MASKS)[0]))  # never the static masks' seed
