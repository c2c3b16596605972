"""Check the properties of a stream by Great Expectations suites over plain tables of facts.

facts           tables of facts about a stream, one row per thing that may be wrong
suites          the properties: for each, its facts and what is expected of them
validation      compare facts with expectations: whether a property holds, and the rows that fail
data_docs       the results as web pages
__main__        python -m siltstone.dagster.checks STREAM
asset_checks    the properties as Dagster asset checks; no other module here imports Dagster
"""
