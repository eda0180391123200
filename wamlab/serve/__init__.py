"""The policy server: any ``Policy`` behind the protocols that public benchmark clients speak; needs wamlab[serve]."""
