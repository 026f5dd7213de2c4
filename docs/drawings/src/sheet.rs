//! The layout and the SVG of a drawing.

use std::fmt::Write as _;

use shardwise_plan::program::MemoryKind;

/// The fill of a shape.
#[derive(Clone, Copy)]
pub(crate) enum Fill {
    Forward,
    Backward,
    Of(MemoryKind),
}

/// The positions of the lanes, perpendicular to the time axis.
struct Lanes {
    phases: f64,
    computed: (f64, f64),
    calls: (f64, f64),
    /// From zero to the peak of any stage.
    memory: (f64, f64),
}

/// One drawing. Time runs to the right or, in a narrow window, down.
pub(crate) struct Sheet {
    tall: bool,
    /// The prefix of pattern names, which must be unique on a page.
    mark: String,
    size: (f64, f64),
    start: f64,
    per_time: f64,
    per_byte: f64,
    lanes: Lanes,
    body: String,
}

const LETTERS: f64 = 12.;

impl Sheet {
    /// An empty sheet, scaled for steps of at most this duration and memory.
    pub(crate) fn new(stage: u8, tall: bool, longest: f64, largest: f64) -> Self {
        let mark = format!("s{stage}{}", if tall { "n" } else { "w" });
        let (size, start, length) = match tall {
            true => ((360., 742.), 34., 560.),
            false => ((750., 410.), 92., 650.),
        };
        let lanes = match tall {
            true => Lanes { phases: 12., computed: (22., 84.), calls: (92., 154.), memory: (168., 354.) },
            false => Lanes { phases: 14., computed: (26., 56.), calls: (64., 94.), memory: (320., 116.) },
        };
        let per_byte = (lanes.memory.1 - lanes.memory.0) / largest;
        Sheet { tall, mark, size, start, per_time: length / longest, per_byte, lanes, body: String::new() }
    }

    fn at(&self, time: f64) -> f64 {
        self.start + time * self.per_time
    }

    fn level(&self, bytes: f64) -> f64 {
        self.lanes.memory.0 + bytes * self.per_byte
    }

    /// Converts coordinates along and across the time axis to x and y.
    fn point(&self, along: f64, across: f64) -> (f64, f64) {
        if self.tall { (across, along) } else { (along, across) }
    }

    fn put(&mut self, shape: &str) {
        self.body.push_str(shape);
        self.body.push('\n');
    }

    fn fill(&self, fill: Fill) -> String {
        let pattern = |name: &str| format!("fill=\"url(#{}-{name})\"", self.mark);
        match fill {
            Fill::Forward => "fill=\"currentColor\" fill-opacity=\"0.06\"".to_string(),
            Fill::Backward => "fill=\"currentColor\" fill-opacity=\"0.22\"".to_string(),
            Fill::Of(MemoryKind::Parameters) => "fill=\"#2b8cd6\" fill-opacity=\"0.5\"".to_string(),
            Fill::Of(MemoryKind::Gradients) => pattern("lines"),
            Fill::Of(MemoryKind::Optimizer) => pattern("dots"),
            Fill::Of(MemoryKind::Unsharded) => pattern("grid"),
            Fill::Of(_) => "fill=\"currentColor\" fill-opacity=\"0.1\"".to_string(),
        }
    }

    fn words(&mut self, (x, y): (f64, f64), anchor: &str, text: &str) {
        self.put(&format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>"));
    }

    fn rectangle(&mut self, along: (f64, f64), across: (f64, f64), fill: Fill) {
        let ((x, y), (right, bottom)) = (self.point(along.0, across.0), self.point(along.1, across.1));
        let (width, height, fill) = (right - x, bottom - y, self.fill(fill));
        self.put(&format!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" rx=\"2\" {fill} stroke=\"currentColor\" stroke-width=\"0.8\"/>"
        ));
    }

    fn line(&mut self, from: (f64, f64), to: (f64, f64), dashes: &str) {
        let ((x1, y1), (x2, y2)) = (self.point(from.0, from.1), self.point(to.0, to.1));
        self.put(&format!(
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"currentColor\" stroke-width=\"1\" stroke-dasharray=\"{dashes}\"/>"
        ));
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
            match self.tall {
                true => self.words((across, 14.), "middle", name),
                false if name == "holds" => {}
                false => self.words((self.start - 10., across + 4.), "end", name),
            }
        }
    }

    /// Draws the name of a phase next to its time.
    pub(crate) fn phase(&mut self, name: &str, start: f64, end: f64) {
        let (start, end, across) = (self.at(start), self.at(end), self.lanes.phases);
        let middle = (start + end) / 2.;
        if self.tall {
            let x = across;
            self.put(&format!(
                "<text x=\"{x:.1}\" y=\"{middle:.1}\" text-anchor=\"middle\" transform=\"rotate(-90 {x:.1} {middle:.1})\">{name}</text>"
            ));
            self.line((start, across + 5.), (end, across + 5.), "none");
        } else {
            self.words((middle, across - 2.), "middle", name);
            self.line((start, across + 4.), (end, across + 4.), "none");
        }
    }

    /// Draws the computation of a unit.
    pub(crate) fn computed(&mut self, start: f64, end: f64, fill: Fill, sign: &str) {
        self.labelled((start, end), self.lanes.computed, fill, sign);
    }

    /// Draws a call.
    pub(crate) fn call(&mut self, start: f64, end: f64, fill: Fill, sign: &str) {
        self.labelled((start, end), self.lanes.calls, fill, sign);
    }

    fn labelled(&mut self, time: (f64, f64), across: (f64, f64), fill: Fill, sign: &str) {
        let along = (self.at(time.0), self.at(time.1));
        self.rectangle(along, across, fill);
        let (x, y) = self.point((along.0 + along.1) / 2., (across.0 + across.1) / 2.);
        if !sign.is_empty() && along.1 - along.0 >= LETTERS * 0.8 {
            self.words((x, y + 4.), "middle", sign);
        }
    }

    /// Draws a wait.
    pub(crate) fn waiting(&mut self, start: f64, end: f64) {
        if end - start > 0.05 {
            let across = (self.lanes.computed.0 + self.lanes.computed.1) / 2.;
            self.line((self.at(start) + 2., across), (self.at(end) - 2., across), "1 4");
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
            .map(|(along, across)| self.point(along, across))
            .map(|(x, y)| format!("{x:.1},{y:.1}"))
            .collect();
        let fill = self.fill(Fill::Of(kind));
        self.put(&format!(
            "<polygon points=\"{}\" {fill} stroke=\"currentColor\" stroke-width=\"0.8\"/>",
            points.join(" ")
        ));
    }

    /// Marks the memory of the unsharded model.
    pub(crate) fn whole(&mut self, bytes: f64) {
        let level = self.level(bytes);
        let end = if self.tall { self.start + 560. } else { self.start + 650. };
        self.line((self.start, level), (end, level), "5 4");
        if !self.tall {
            self.words((self.start, level - 5.), "start", "what stage 0 keeps between steps");
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
        let (columns, first): (&[f64], f64) = if self.tall { (&[22.], 614.) } else { (&[92., 400.], 340.) };
        let place = |index: usize| (columns[index % columns.len()], first + 18. * (index / columns.len()) as f64);
        for (index, &(kind, text)) in shown.iter().enumerate() {
            let ((x, y), tall) = (place(index), self.tall);
            self.tall = false;
            self.rectangle((x, x + 14.), (y - 9., y + 1.), Fill::Of(kind));
            self.tall = tall;
            self.words((x + 20., y), "start", text);
        }
        let signs = "e, 0–2, h: embedding, blocks, head; dotted: waits";
        let y = first + 18. * shown.len().div_ceil(columns.len()) as f64;
        self.words((columns[0], y), "start", signs);
        if self.tall && stage > 0 {
            self.words((columns[0], y + 18.), "start", "dashed: what stage 0 keeps between steps");
        }
    }

    /// Returns the SVG. It has no empty line, because that would end the HTML block in Markdown.
    pub(crate) fn finish(self, title: &str, description: &str, order: &str) -> String {
        let Sheet { tall, mark, size: (width, height), body, .. } = self;
        let shape = if tall { "narrow" } else { "wide" };
        let mut text = String::new();
        let written = write!(
            text,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"drawing {shape}\" viewBox=\"0 0 {width} {height}\" role=\"img\" \
             aria-labelledby=\"{mark}-title {mark}-desc\" font-family=\"sans-serif\" font-size=\"{LETTERS}\" fill=\"currentColor\" \
             data-calls=\"{order}\">\n\
             <title id=\"{mark}-title\">{title}</title>\n<desc id=\"{mark}-desc\">{description}</desc>\n<defs>\n\
             <pattern id=\"{mark}-lines\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
             <rect width=\"6\" height=\"6\" fill=\"#e69f00\" fill-opacity=\"0.22\"/>\
             <rect width=\"1.6\" height=\"6\" fill=\"#e69f00\" fill-opacity=\"0.6\"/></pattern>\n\
             <pattern id=\"{mark}-dots\" width=\"7\" height=\"7\" patternUnits=\"userSpaceOnUse\">\
             <rect width=\"7\" height=\"7\" fill=\"#00a87c\" fill-opacity=\"0.25\"/>\
             <circle cx=\"2\" cy=\"2\" r=\"1.4\" fill=\"#00a87c\" fill-opacity=\"0.9\"/></pattern>\n\
             <pattern id=\"{mark}-grid\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\">\
             <rect width=\"6\" height=\"6\" fill=\"#2b8cd6\" fill-opacity=\"0.12\"/>\
             <path d=\"M0 0H6M0 0V6\" stroke=\"#2b8cd6\" stroke-opacity=\"0.7\" fill=\"none\"/></pattern>\n</defs>\n{body}</svg>\n"
        );
        written.expect("a string takes what is written to it");
        text
    }
}
