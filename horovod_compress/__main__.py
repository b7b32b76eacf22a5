"""python -m horovod_compress: the command line tool, hvdcompress."""

from .tools.cli import main

if __name__ == "__main__":
    main()
