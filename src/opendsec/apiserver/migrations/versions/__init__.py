"""One file a change of the schema; never edited once released."""
