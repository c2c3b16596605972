//! Run one of NEXMark's queries on DBSP, the engine of Feldera: in memory, without checkpoints.
//!
//!     nexmark-feldera INPUT [--files-a-step N] [--workers N] [--answers FILE]
//!
//! INPUT is what `benchmarks.nexmark` writes: `query` has the query's number, `steps` the numbers of steps of the
//! warm-up and of those that are measured, and `<kind>/NNNNNN.parquet` the events, of which a step reads N files of
//! each kind. A step reads its files, each on a thread, and runs one transaction of the circuit. The rows that the
//! circuit makes are counted and dropped in the workers. Prints, as its last line, when the measured steps began and
//! ended, in seconds since the epoch.
//!
//! With `--answers`, the answer after the last step is written as JSON lines, one array of columns per row, in the
//! order of the columns of `tests/nexmark_answers.py`; times are microseconds since the epoch.

mod answer;
mod queries;
mod source;

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use std::{env, fs, thread};

use anyhow::{Context, Result, bail};
use dbsp::circuit::CircuitConfig;
use dbsp::mimalloc::MiMalloc;
use dbsp::{DBSPHandle, Runtime};

use source::Source;

/// Feldera's own choice.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

struct Options {
    input: PathBuf,
    files_a_step: usize,
    workers: usize,
    answers: Option<PathBuf>,
}

fn main() -> Result<()> {
    let options = parse(env::args().skip(1))?;
    let number: u32 = fs::read_to_string(options.input.join("query"))?.trim().parse()?;
    let [warm_up, measured]: [usize; 2] = serde_json::from_str(&fs::read_to_string(options.input.join("steps"))?)?;
    let is_kept = options.answers.is_some();
    let config = CircuitConfig::with_workers(options.workers).with_allow_input_during_commit(false);
    let (mut circuit, (sources, mut answer)) =
        Runtime::init_circuit(config, move |circuit| queries::build(number, circuit, is_kept))?;
    let mut began_s = now_s();
    for step in 0..warm_up + measured {
        if step == warm_up {
            began_s = now_s();
        }
        run_step(&mut circuit, &options, &sources, step)?;
        answer.take();
    }
    let ended_s = now_s();
    if let Some(path) = &options.answers {
        answer.write(path)?;
    }
    circuit.kill().ok();
    eprintln!("{} rows", answer::rows());
    println!("{}", serde_json::to_string(&[began_s, ended_s])?);
    Ok(())
}

/// Feed the events of a step's files, and run a transaction over them.
fn run_step(circuit: &mut DBSPHandle, options: &Options, sources: &[Source], step: usize) -> Result<()> {
    let first = step * options.files_a_step;
    thread::scope(|scope| {
        let read = |number: usize| {
            sources.iter().try_for_each(|source| source.feed(&path_of(&options.input, source.kind, number)))
        };
        let threads: Vec<_> = (first..first + options.files_a_step).map(|n| scope.spawn(move || read(n))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("a reader panicked"))
    })?;
    Ok(circuit.transaction()?)
}

fn path_of(input: &Path, kind: &str, number: usize) -> PathBuf {
    input.join(kind).join(format!("{number:06}.parquet"))
}

fn now_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("a time after 1970").as_secs_f64()
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Options> {
    let mut input = None;
    let (mut files_a_step, mut workers, mut answers) = (2, 2, None);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().with_context(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--files-a-step" => files_a_step = value()?.parse()?,
            "--workers" => workers = value()?.parse()?,
            "--answers" => answers = Some(PathBuf::from(value()?)),
            _ if input.is_none() => input = Some(PathBuf::from(&argument)),
            _ => bail!("unknown argument: {argument}"),
        }
    }
    let input = input.context("the input directory is missing")?;
    Ok(Options { input, files_a_step, workers, answers })
}
