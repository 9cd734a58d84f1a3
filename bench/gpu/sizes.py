"""Sizes: the GPTs that are trained on a GPU."""

from bench.models import GPT, TINY, Size

SIZES = {
    "tiny": TINY,
    "gpt": GPT,
    "large": Size("large", 2048, 1024, 4, blocks=24, heads=16, vocabulary=50_304),
    "gpt-124m": Size("gpt-124m", 768, 1024, 8, blocks=12, heads=12, vocabulary=50_304),
    "gpt-1b": Size("gpt-1b", 2048, 1024, 2, blocks=18, heads=16, vocabulary=50_304),
}
