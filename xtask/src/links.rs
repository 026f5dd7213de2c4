//! Claims about slow links: what is sent with fewer bytes.

use std::process::Command;

use anyhow::Result;
use serde_json::Value;

use crate::claim::{Claim, Verdict};
use crate::mutants;
use crate::setting::{BASE, Setting, number, profile_on_hosts, shardwise};
use crate::workspace::{Scratch, build, median, output_of};

pub(crate) const CLAIMS: &[Claim] = &[
    Claim {
        group: "links",
        name: "encoding",
        what: "quantizing parameters, and the way back, takes at most twice as long as copying them, on one core",
        heavy: true,
        measure: encoding,
    },
    Claim {
        group: "links",
        name: "parameters",
        what: "between two hosts at 100 Mbit/s, quantized parameters shorten a step of stage 3",
        heavy: true,
        measure: parameters,
    },
    Claim {
        group: "links",
        name: "mutants",
        what: "the mutants of zero/mutants that concern what is sent with fewer bytes",
        heavy: true,
        measure: || mutants::measure_some(&["int8-"]),
    },
];

const ROUNDS: usize = 3;
const RATE: &str = "100mbit";

fn encoding() -> Result<Verdict> {
    const ELEMENTS: usize = 1 << 26;
    let program = build("bench-int8", &["build", "--release", "--workspace", "--bins"])?;
    let (mut ratios, mut figures) = (Vec::new(), Vec::new());
    let report: Value = serde_json::from_str(&output_of(Command::new(program).arg(ELEMENTS.to_string()))?)?;
    for dtype in ["f32", "bf16"] {
        let [encode_s, decode_s, copy_s] = ["encode_s", "decode_s", "copy_s"].map(|key| number(&report[dtype], key));
        let [encode, decode] = [encode_s / copy_s, decode_s / copy_s];
        figures.push(format!("{dtype}: there {encode:.2}, back {decode:.2} times a copy of {copy_s:.3} s"));
        ratios.extend([encode, decode]);
    }
    let holds = ratios.iter().all(|&ratio| ratio <= 2.);
    Ok(Verdict { figure: figures.join("; "), bar: "2".to_string(), holds })
}

fn parameters() -> Result<Verdict> {
    let (program, scratch) = (shardwise()?, Scratch::new("links")?);
    let (mut ratios, mut exact_s, mut quantized_s) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        let step_s = |is_quantized| -> Result<f64> {
            let setting = Setting { is_quantized, ..BASE };
            let recipe = setting.write(&scratch, setting.size.blocks)?;
            Ok(number(&profile_on_hosts(&program, &recipe, &setting, RATE, 3)?, "least_step_s"))
        };
        let (exact, quantized) = (step_s(false)?, step_s(true)?);
        println!("round {round}: {exact:.2} s, with quantized parameters {quantized:.2} s");
        ratios.push(exact / quantized);
        exact_s.push(exact);
        quantized_s.push(quantized);
    }
    let [ratio, exact_s, quantized_s] = [&ratios, &exact_s, &quantized_s].map(|figures| median(figures));
    Ok(Verdict {
        figure: format!("{ratio:.2} times as fast ({quantized_s:.2} s instead of {exact_s:.2} s)"),
        bar: "1.3".to_string(),
        holds: ratio >= 1.3,
    })
}
