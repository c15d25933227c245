"""verl's own way to move weights, beside which the package's adapter is measured."""
