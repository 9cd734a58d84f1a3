"""Laws: how the next value of each tensor that forward writes follows from the one before."""
