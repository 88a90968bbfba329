"""JSON Schemas of the documents and files that commands write and read; they know no models and no commands."""
