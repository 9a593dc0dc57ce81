"""`python -m deepinfer`: the command line where no script was installed."""

from deepinfer.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
