//! The layout of a drawing of a step.

use shardwise_plan::program::MemoryKind;

use crate::canvas::{About, Canvas, Fill};

pub(crate) const FORWARD: Fill = Fill::Plain("currentColor", 0.06);
pub(crate) const BACKWARD: Fill = Fill::Plain("currentColor", 0.22);

/// Each kind of memory has its own fill, and so has what sends or updates it.
pub(crate) fn fill_of(kind: MemoryKind) -> Fill {
    match kind {
        MemoryKind::Parameters => Fill::Plain("#2b8cd6", 0.5),
        MemoryKind::Gradients => Fill::Pattern("lines"),
        MemoryKind::Optimizer => Fill::Pattern("dots"),
        MemoryKind::Unsharded => Fill::Pattern("grid"),
        _ => Fill::Plain("currentColor", 0.1),
    }
}

const PATTERNS: [(&str, &str); 3] = [
    (
        "lines",
        "width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
         <rect width=\"6\" height=\"6\" fill=\"#e69f00\" fill-opacity=\"0.22\"/>\
         <rect width=\"1.6\" height=\"6\" fill=\"#e69f00\" fill-opacity=\"0.6\"/>",
    ),
    (
        "dots",
        "width=\"7\" height=\"7\" patternUnits=\"userSpaceOnUse\">\
         <rect width=\"7\" height=\"7\" fill=\"#00a87c\" fill-opacity=\"0.25\"/>\
         <circle cx=\"2\" cy=\"2\" r=\"1.4\" fill=\"#00a87c\" fill-opacity=\"0.9\"/>",
    ),
    (
        "grid",
        "width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\">\
         <rect width=\"6\" height=\"6\" fill=\"#2b8cd6\" fill-opacity=\"0.12\"/>\
         <path d=\"M0 0H6M0 0V6\" stroke=\"#2b8cd6\" stroke-opacity=\"0.7\" fill=\"none\"/>",
    ),
];

/// The positions of the lanes, perpendicular to the time axis.
struct Lanes {
    phases: f64,
    computed: (f64, f64),
    calls: (f64, f64),
    /// From zero to the peak of any stage.
    memory: (f64, f64),
}

/// The drawing of a step.
pub(crate) struct Sheet {
    canvas: Canvas,
    start: f64,
    per_time: f64,
    per_byte: f64,
    lanes: Lanes,
}

impl Sheet {
    /// An empty sheet, scaled for steps of at most this duration and memory.
    pub(crate) fn new(stage: u8, tall: bool, longest: f64, largest: f64) -> Self {
        let (size, start, length) = match tall {
            true => ((360., 742.), 34., 560.),
            false => ((750., 410.), 92., 650.),
        };
        let lanes = match tall {
            true => Lanes { phases: 12., computed: (22., 84.), calls: (92., 154.), memory: (168., 354.) },
            false => Lanes { phases: 14., computed: (26., 56.), calls: (64., 94.), memory: (320., 116.) },
        };
        let per_byte = (lanes.memory.1 - lanes.memory.0) / largest;
        let canvas = Canvas::new(&format!("s{stage}"), tall, size);
        Sheet { canvas, start, per_time: length / longest, per_byte, lanes }
    }

    fn at(&self, time: f64) -> f64 {
        self.start + time * self.per_time
    }

    fn level(&self, bytes: f64) -> f64 {
        self.lanes.memory.0 + bytes * self.per_byte
    }

    /// Draws the names of the lanes.
    pub(crate) fn lanes(&mut self) {
        let middle = |(from, to): (f64, f64)| (from + to) / 2.;
        let lanes = [
            (middle(self.lanes.computed), "computes"),
            (middle(self.lanes.calls), "sends"),
            (middle(self.lanes.memory), "holds"),
        ];
        for (across, name) in lanes {
            match self.canvas.tall {
                true => self.canvas.words((across, 14.), "middle", name),
                false if name == "holds" => {}
                false => self.canvas.words((self.start - 10., across + 4.), "end", name),
            }
        }
    }

    /// Draws the name of a phase next to its time.
    pub(crate) fn phase(&mut self, name: &str, start: f64, end: f64) {
        let (start, end, across) = (self.at(start), self.at(end), self.lanes.phases);
        let middle = (start + end) / 2.;
        if self.canvas.tall {
            let x = across;
            self.canvas.put(&format!(
                "<text x=\"{x:.1}\" y=\"{middle:.1}\" text-anchor=\"middle\" transform=\"rotate(-90 {x:.1} {middle:.1})\">{name}</text>"
            ));
            self.canvas.line((start, across + 5.), (end, across + 5.), "none");
        } else {
            self.canvas.words((middle, across - 2.), "middle", name);
            self.canvas.line((start, across + 4.), (end, across + 4.), "none");
        }
    }

    /// Draws the computation of a unit.
    pub(crate) fn computed(&mut self, start: f64, end: f64, fill: Fill, sign: &str) {
        self.canvas.labelled((self.at(start), self.at(end)), self.lanes.computed, fill, sign);
    }

    /// Draws a call.
    pub(crate) fn call(&mut self, start: f64, end: f64, fill: Fill, sign: &str) {
        self.canvas.labelled((self.at(start), self.at(end)), self.lanes.calls, fill, sign);
    }

    /// Draws a wait.
    pub(crate) fn waiting(&mut self, start: f64, end: f64) {
        if end - start > 0.05 {
            let across = (self.lanes.computed.0 + self.lanes.computed.1) / 2.;
            self.canvas.line((self.at(start) + 2., across), (self.at(end) - 2., across), "1 4");
        }
    }

    /// Draws one kind of memory over time, on top of the kinds below.
    pub(crate) fn area(&mut self, kind: MemoryKind, times: &[f64], below: &[f64], above: &[f64]) {
        let edge = |levels: &[f64]| -> Vec<(f64, f64)> {
            let pairs = times.windows(2).zip(levels);
            pairs
                .flat_map(|(t, &level)| [(self.at(t[0]), self.level(level)), (self.at(t[1]), self.level(level))])
                .collect()
        };
        let outline: Vec<(f64, f64)> = edge(above).into_iter().chain(edge(below).into_iter().rev()).collect();
        let points: Vec<String> = outline
            .into_iter()
            .map(|(along, across)| self.canvas.point(along, across))
            .map(|(x, y)| format!("{x:.1},{y:.1}"))
            .collect();
        let fill = self.canvas.fill(fill_of(kind));
        self.canvas.put(&format!(
            "<polygon points=\"{}\" {fill} stroke=\"currentColor\" stroke-width=\"0.8\"/>",
            points.join(" ")
        ));
    }

    /// Marks the memory of the unsharded model.
    pub(crate) fn whole(&mut self, bytes: f64) {
        let level = self.level(bytes);
        let end = if self.canvas.tall { self.start + 560. } else { self.start + 650. };
        self.canvas.line((self.start, level), (end, level), "5 4");
        if !self.canvas.tall {
            self.canvas.words((self.start, level - 5.), "start", "what stage 0 keeps between steps");
        }
    }

    /// Draws the legend.
    pub(crate) fn legend(&mut self, stage: u8) {
        let entries = [
            (MemoryKind::Optimizer, "optimizer state, and the update"),
            (MemoryKind::Parameters, if stage == 0 { "parameters" } else { "parameters, and their all-gather" }),
            (
                MemoryKind::Gradients,
                match stage {
                    0 => "gradients, and their all-reduce",
                    _ => "gradients, and their reduce-scatter",
                },
            ),
            (MemoryKind::Activations, "activations"),
            (MemoryKind::Unsharded, "unsharded parameters and gradients"),
        ];
        let shown = if stage >= 2 { &entries[..] } else { &entries[..4] };
        let (columns, first): (&[f64], f64) = if self.canvas.tall { (&[22.], 614.) } else { (&[92., 400.], 340.) };
        let place = |index: usize| (columns[index % columns.len()], first + 18. * (index / columns.len()) as f64);
        for (index, &(kind, text)) in shown.iter().enumerate() {
            self.canvas.entry(place(index), fill_of(kind), text);
        }
        let signs = "e, 0–2, h: embedding, blocks, head; dotted: waits";
        let y = first + 18. * shown.len().div_ceil(columns.len()) as f64;
        self.canvas.words((columns[0], y), "start", signs);
        if self.canvas.tall && stage > 0 {
            self.canvas.words((columns[0], y + 18.), "start", "dashed: what stage 0 keeps between steps");
        }
    }

    /// Returns the SVG.
    pub(crate) fn finish(self, title: &str, description: &str, calls: &str) -> String {
        self.canvas.finish(&About { title, description, data: ("data-calls", calls), patterns: &PATTERNS })
    }
}
