"""The command line: a thin skin over the SDK. It knows no server's modules and keeps no state."""
