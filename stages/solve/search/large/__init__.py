"""Large problems: a strong incumbent and a bound within given seconds."""
