"""`python -m mx_cli` is `mx`."""

from mx_cli.cli.app import main

if __name__ == "__main__":
    main()
