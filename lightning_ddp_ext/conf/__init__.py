"""The packaged configuration. Importing it registers the schemas its files refer to, also for other applications."""

import lightning_ddp_ext.conf.schemas  # noqa: F401
