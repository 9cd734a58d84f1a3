"""Prompt writer: that of checkpoints, with its share of a machine that other tests keep busy."""

import sys

from penstock.checkpoints import writer

if __name__ == "__main__":
    writer._NICE = 0
    writer.main(sys.argv[1:])
