//! A custom data source: the bytes of the files on the command line, cut into samples at random positions.
//!
//! A sample is a function of its index, so any number of ranks trains on the same samples, and a resumed run needs no state. Each
//! rank reads the samples that it needs, and there is no list of samples.
//!
//! ```sh
//! cargo build --release --example data
//! mpirun -n 2 target/release/examples/data README.md ARCHITECTURE.md     # or alone, without mpirun
//! ```

use std::error::Error;
use std::ops::ControlFlow;

use shardwise::model::{Batch, LlamaConfig, Model, splitmix64};
use shardwise::schedule::Kind;
use shardwise::tch::Tensor;
use shardwise::{
    AdamW, BatchSize, Optimizer, Options, Sampling, Schedule, Sharding, Source, SourceError, Trainer, generate, init,
};

const SEQ_LEN: usize = 64;

/// Text as bytes. A byte is a token.
struct Files(Vec<u8>);

impl Files {
    fn read(paths: &[String]) -> Result<Self, Box<dyn Error>> {
        let mut bytes = Vec::new();
        for path in paths {
            bytes.extend(std::fs::read(path).map_err(|error| format!("{path}: {error}"))?);
        }
        match bytes.len() > SEQ_LEN {
            true => Ok(Files(bytes)),
            false => Err(format!("give files with more than {SEQ_LEN} bytes, such as README.md").into()),
        }
    }
}

impl Source for Files {
    fn batch(&self, numbers: &[u64]) -> Result<Batch, SourceError> {
        let Files(bytes) = self;
        // One more byte than the sequence length: the target of each byte is the next one.
        let window = |&number: &u64| {
            let start = splitmix64(number) as usize % (bytes.len() - SEQ_LEN);
            bytes[start..=start + SEQ_LEN].iter().map(|&byte| i64::from(byte))
        };
        let rows = Tensor::f_from_slice(&numbers.iter().flat_map(window).collect::<Vec<i64>>())?;
        let rows = rows.f_view([numbers.len() as i64, -1])?;
        let part = |from| rows.f_narrow(1, from, SEQ_LEN as i64);
        Ok(Batch::new(part(0)?, part(1)?))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let files = Files::read(&std::env::args().skip(1).collect::<Vec<_>>())?;
    let ranks = shardwise::ranks()?;
    let (size, is_first) = (ranks.world.size(), ranks.world.rank() == 0);
    if is_first {
        println!("{} bytes to learn from, on {size} ranks", files.0.len());
    }
    let model = Model::from_config(LlamaConfig::new(256, 96, 2, 4, 256))?;
    let schedule = Schedule { lr: 4e-3, warmup_steps: 20, steps: 240, kind: Kind::Cosine { min_lr_ratio: 0.1 } };
    let options = Options::new(Sharding::stage(3)?, Optimizer::AdamW(AdamW::default()), schedule);
    let options = Options { max_grad_norm: Some(1.), ..options };
    let mut trainer = Trainer::new(model, ranks, options, &mut init::from_seed(5))?;
    // 16 samples per step on any number of ranks.
    let batch_size = BatchSize { micro_batch_size: 16 / size, gradient_accumulation_steps: 1 };
    trainer.train(&files, batch_size, 240, &mut |report| {
        if is_first && (report.step == 1 || report.step % 40 == 0) {
            println!("step {:>3}  {:.4} bits per byte", report.step, report.loss / std::f64::consts::LN_2);
        }
    })?;
    let prompt: Vec<i64> = b"Shardwise ".iter().map(|&byte| i64::from(byte)).collect();
    let sampling = Sampling { temperature: 0.6, top_k: None, top_p: None, seed: 2 };
    let text = generate(&mut trainer, &prompt, 150, &[], &sampling, &mut |_| ControlFlow::Continue(()))?;
    if is_first {
        let bytes: Vec<u8> = prompt.iter().chain(&text).map(|&byte| byte as u8).collect();
        println!("{}", String::from_utf8_lossy(&bytes));
    }
    Ok(())
}
