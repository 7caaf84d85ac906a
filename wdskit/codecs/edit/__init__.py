"""An image file into another: turned, resized, encoded again."""
