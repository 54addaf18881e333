"""`python -m sharpen` is the command `sharpen`."""

from sharpen.cli.main import main

if __name__ == "__main__":
    main()
