"""What only a GPU can show, as one command: `python -m benchmark.gpu`, or `make test-gpu`."""
