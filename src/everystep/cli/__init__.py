"""The command line. Commands that only read a store do not import torch."""
