"""Engines and their link to the worker: one file per engine, and only that file imports its third parties."""
