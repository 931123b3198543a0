"""The command line `dppo`."""
