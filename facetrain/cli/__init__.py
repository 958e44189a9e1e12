"""The command line: each command parses its options, calls one function and prints one result."""
