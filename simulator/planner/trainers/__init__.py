"""Writes plans as arguments of training frameworks, and reads them back."""
