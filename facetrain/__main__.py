"""`python -m facetrain`: what torchrun starts on every rank."""

from facetrain.cli import main

if __name__ == "__main__":
    main()
