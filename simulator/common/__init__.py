"""What every package may use: array types, tables for people, list expressions."""
