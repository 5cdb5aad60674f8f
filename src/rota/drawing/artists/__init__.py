"""What figures are made of. Each module needs Matplotlib and NumPy, and is imported when something is drawn."""
