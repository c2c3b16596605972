//! Reads columns of Parquet files into an input of a circuit.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result};
use arrow::array::{Array, AsArray, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Int64Type, TimestampMicrosecondType};
use dbsp::operator::{IndexedZSetHandle, ZSetHandle};
use dbsp::utils::Tup2;
use dbsp::{DBData, ZWeight};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

const BATCH_ROWS: usize = 65_536;

type Feed = Box<dyn Fn(&Columns) + Send + Sync>;

/// An input of a circuit: a kind of event, the columns that are read, and what passes their rows on.
pub struct Source {
    pub kind: &'static str,
    columns: &'static [&'static str],
    feed: Feed,
}

impl Source {
    /// Make a source of a Z-set of rows, each of which is added once.
    pub fn of_rows<K: DBData>(
        kind: &'static str,
        columns: &'static [&'static str],
        handle: ZSetHandle<K>,
        row: impl Fn(&Columns, usize) -> K + Send + Sync + 'static,
    ) -> Source {
        let feed = Box::new(move |columns: &Columns| {
            let mut rows: Vec<Tup2<K, ZWeight>> = (0..columns.len()).map(|n| Tup2(row(columns, n), 1)).collect();
            handle.append(&mut rows);
        });
        Source { kind, columns, feed }
    }

    /// Make a source of an indexed Z-set: of keys and values.
    pub fn of_pairs<K: DBData, V: DBData>(
        kind: &'static str,
        columns: &'static [&'static str],
        handle: IndexedZSetHandle<K, V>,
        pair: impl Fn(&Columns, usize) -> (K, V) + Send + Sync + 'static,
    ) -> Source {
        let feed = Box::new(move |columns: &Columns| {
            let pairs = (0..columns.len()).map(|n| pair(columns, n));
            let mut rows: Vec<Tup2<K, Tup2<V, ZWeight>>> = pairs.map(|(k, v)| Tup2(k, Tup2(v, 1))).collect();
            handle.append(&mut rows);
        });
        Source { kind, columns, feed }
    }

    /// Feed all rows of a file.
    pub fn feed(&self, path: &Path) -> Result<()> {
        let file = File::open(path).with_context(|| path.display().to_string())?;
        let builder = ParquetRecordBatchReaderBuilder::try_new(file)?;
        let mask = ProjectionMask::columns(builder.parquet_schema(), self.columns.iter().copied());
        for batch in builder.with_projection(mask).with_batch_size(BATCH_ROWS).build()? {
            (self.feed)(&Columns::new(&batch?, self.columns)?);
        }
        Ok(())
    }
}

enum Column {
    /// Whole numbers, and times in microseconds since the epoch.
    Numbers(Vec<i64>),
    Texts(StringArray),
}

/// Columns of a file, in the order of the source's names.
pub struct Columns(Vec<Column>);

impl Columns {
    fn new(batch: &RecordBatch, names: &[&str]) -> Result<Columns> {
        let columns = names.iter().map(|name| {
            let column = batch.column_by_name(name).with_context(|| format!("no column {name}"))?;
            Ok(match column.data_type() {
                DataType::Utf8 => Column::Texts(column.as_string().clone()),
                DataType::Int64 => Column::Numbers(column.as_primitive::<Int64Type>().values().to_vec()),
                _ => Column::Numbers(column.as_primitive::<TimestampMicrosecondType>().values().to_vec()),
            })
        });
        Ok(Columns(columns.collect::<Result<_>>()?))
    }

    fn len(&self) -> usize {
        match &self.0[0] {
            Column::Numbers(values) => values.len(),
            Column::Texts(values) => values.len(),
        }
    }

    /// Return the number in the n-th row of a column.
    pub fn number(&self, column: usize, n: usize) -> i64 {
        match &self.0[column] {
            Column::Numbers(values) => values[n],
            Column::Texts(_) => panic!("column {column} has texts"),
        }
    }

    /// Return the text in the n-th row of a column.
    pub fn text(&self, column: usize, n: usize) -> String {
        match &self.0[column] {
            Column::Texts(values) => values.value(n).to_owned(),
            Column::Numbers(_) => panic!("column {column} has numbers"),
        }
    }
}
