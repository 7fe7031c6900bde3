"""One file a lineage: functions that read the keys of a family's files."""
