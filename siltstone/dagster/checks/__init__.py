"""What must hold of a stream, as Great Expectations suites over plain tables of facts.

facts           what the engine knows, a row a thing that may be wrong
suites          one property each: which facts, what is expected of them
validation      facts and expectations -> whether it holds, and the rows for which it does not
data_docs       the same as pages for people
__main__        python -m siltstone.dagster.checks STREAM
asset_checks    the adapter: the same as Dagster asset checks; nothing else here knows Dagster
"""
