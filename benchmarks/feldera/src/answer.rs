//! Consumes what a circuit makes: counts and drops it, or adds it up to the answer of the query.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Result, ensure};
use dbsp::typed_batch::{DynBatchReader, IndexedZSetReader};
use dbsp::{DBData, OrdIndexedZSet, OrdZSet, RootCircuit, Stream, ZWeight};
use serde_json::Value;

static ROWS: AtomicUsize = AtomicUsize::new(0);

/// Return how many rows, additions and removals, the circuits have made.
pub fn rows() -> usize {
    ROWS.load(Ordering::Relaxed)
}

type Change = (Value, ZWeight);

/// The answer of a query, if it is kept: the rows as JSON, and how often each is there.
pub struct Answer {
    changes: Option<Box<dyn Fn() -> Vec<Change> + Send>>,
    rows: BTreeMap<String, ZWeight>,
}

impl Answer {
    /// Consume a stream of keys and values; `row` makes the columns of a row, and is used only if the answer is kept.
    pub fn of_pairs<K: DBData, V: DBData>(
        stream: &Stream<RootCircuit, OrdIndexedZSet<K, V>>,
        is_kept: bool,
        row: impl Fn(&K, &V) -> Value + Send + 'static,
    ) -> Answer {
        stream.inspect(|batch| count(batch));
        let changes = is_kept.then(|| {
            let output = stream.accumulate_output();
            Box::new(move || output.concat().iter().map(|(k, v, weight)| (row(&k, &v), weight)).collect()) as Box<_>
        });
        Answer { changes, rows: BTreeMap::new() }
    }

    /// Consume a stream of rows.
    pub fn of_rows<K: DBData>(
        stream: &Stream<RootCircuit, OrdZSet<K>>,
        is_kept: bool,
        row: impl Fn(&K) -> Value + Send + 'static,
    ) -> Answer {
        stream.inspect(|batch| count(batch));
        let changes = is_kept.then(|| {
            let output = stream.accumulate_output();
            Box::new(move || output.concat().iter().map(|(k, (), weight)| (row(&k), weight)).collect()) as Box<_>
        });
        Answer { changes, rows: BTreeMap::new() }
    }

    /// Add what the last transaction has changed.
    pub fn take(&mut self) {
        for (row, weight) in self.changes.iter().flat_map(|changes| changes()) {
            *self.rows.entry(row.to_string()).or_default() += weight;
        }
        self.rows.retain(|_, weight| *weight != 0);
    }

    /// Write each row as a line.
    pub fn write(&self, path: &Path) -> Result<()> {
        let mut file = BufWriter::new(File::create(path)?);
        for (row, &weight) in &self.rows {
            ensure!(weight > 0, "a row is there {weight} times: {row}");
            for _ in 0..weight {
                writeln!(file, "{row}")?;
            }
        }
        Ok(file.flush()?)
    }
}

fn count<B: IndexedZSetReader>(batch: &B) {
    ROWS.fetch_add(batch.inner().len(), Ordering::Relaxed);
}
