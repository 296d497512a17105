"""The version of this package, as instances tell it to each other."""

VERSION = "0.1.0"
