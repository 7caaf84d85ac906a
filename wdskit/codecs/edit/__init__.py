"""Edit image files: turn, resize and encode them again."""
