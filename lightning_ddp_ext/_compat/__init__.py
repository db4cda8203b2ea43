"""Every private name of Lightning, torch and torchmetrics that this package touches."""
