"""A team's services without containers: PostgreSQL, an S3 store, Prefect's server and a worker on one machine."""
