"""`python -m kvbus` is `kvbus`."""

from kvbus.cli import main

if __name__ == "__main__":
    main()
