"""Plans in the words of trainers, and back."""
