"""The SDK as written by hand."""
