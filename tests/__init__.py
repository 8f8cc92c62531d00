"""Tests mirror the packages; a folder of tests is a package, so that ranks can import a test function by name."""
