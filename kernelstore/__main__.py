"""``python -m kernelstore``."""

from kernelstore.cli import main

if __name__ == "__main__":
    main()
