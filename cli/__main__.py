"""`python -m dflash_cli`: the same command where no script is on the path."""

from .main import main

main(prog_name="dflash")
