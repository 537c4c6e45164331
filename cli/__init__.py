"""The command line: words in, words out.  All work is done by the two stages."""
