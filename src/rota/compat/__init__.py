"""Code written for other systems runs on Rota: only its import lines change."""
