"""`python -m facetrain`, which torchrun starts on every rank."""

from facetrain.cli.app import main

if __name__ == "__main__":
    main()
