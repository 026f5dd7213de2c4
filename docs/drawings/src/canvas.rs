//! An SVG along a time axis: shapes, text and fills.

use std::fmt::Write as _;

/// The height of letters.
pub(crate) const LETTERS: f64 = 12.;
const SMALL_LETTERS: f64 = 10.;

/// The fill of a shape.
#[derive(Clone, Copy)]
pub(crate) enum Fill {
    /// A color and its opacity.
    Plain(&'static str, f64),
    /// The name of a pattern, which [`Canvas::finish`] gets.
    Pattern(&'static str),
}

/// An SVG that grows. Time runs to the right or, in a narrow window, down.
pub(crate) struct Canvas {
    pub(crate) tall: bool,
    /// The prefix of pattern names, which must be unique on a page.
    mark: String,
    size: (f64, f64),
    body: String,
}

/// The texts of a drawing that are not drawn.
pub(crate) struct About<'a> {
    pub(crate) title: &'a str,
    pub(crate) description: &'a str,
    /// A `data-` attribute, by which tests compare the drawing with a real step.
    pub(crate) data: (&'a str, &'a str),
    /// Patterns with their names.
    pub(crate) patterns: &'a [(&'a str, &'a str)],
}

impl Canvas {
    pub(crate) fn new(mark: &str, tall: bool, size: (f64, f64)) -> Self {
        let mark = format!("{mark}{}", if tall { "n" } else { "w" });
        Canvas { tall, mark, size, body: String::new() }
    }

    /// Converts coordinates along and across the time axis to x and y.
    pub(crate) fn point(&self, along: f64, across: f64) -> (f64, f64) {
        if self.tall { (across, along) } else { (along, across) }
    }

    pub(crate) fn put(&mut self, shape: &str) {
        self.body.push_str(shape);
        self.body.push('\n');
    }

    pub(crate) fn fill(&self, fill: Fill) -> String {
        match fill {
            Fill::Plain(color, opacity) => format!("fill=\"{color}\" fill-opacity=\"{opacity}\""),
            Fill::Pattern(name) => format!("fill=\"url(#{}-{name})\"", self.mark),
        }
    }

    pub(crate) fn words(&mut self, (x, y): (f64, f64), anchor: &str, text: &str) {
        self.put(&format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>"));
    }

    /// A rectangle along and across the time axis.
    pub(crate) fn rectangle(&mut self, along: (f64, f64), across: (f64, f64), fill: Fill) {
        self.shape(self.point(along.0, across.0), self.point(along.1, across.1), fill);
    }

    /// A rectangle with the number or letter that it stands for, if there is room.
    pub(crate) fn labelled(&mut self, along: (f64, f64), across: (f64, f64), fill: Fill, sign: &str) {
        self.rectangle(along, across, fill);
        let (x, y) = self.point((along.0 + along.1) / 2., (across.0 + across.1) / 2.);
        if !sign.is_empty() && along.1 - along.0 >= LETTERS * 0.8 {
            self.words((x, y + 4.), "middle", sign);
        }
    }

    /// Smaller text, centered on a point along and across the time axis.
    pub(crate) fn small_words(&mut self, along: f64, across: f64, text: &str) {
        let (x, y) = self.point(along, across);
        let y = y + SMALL_LETTERS * 0.36;
        self.put(&format!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\" font-size=\"{SMALL_LETTERS}\">{text}</text>"
        ));
    }

    /// An entry of the legend.
    pub(crate) fn entry(&mut self, (x, y): (f64, f64), fill: Fill, text: &str) {
        self.shape((x, y - 9.), (x + 14., y + 1.), fill);
        self.words((x + 20., y), "start", text);
    }

    fn shape(&mut self, (x, y): (f64, f64), (right, bottom): (f64, f64), fill: Fill) {
        let (width, height, fill) = (right - x, bottom - y, self.fill(fill));
        self.put(&format!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" rx=\"2\" {fill} stroke=\"currentColor\" stroke-width=\"0.8\"/>"
        ));
    }

    pub(crate) fn line(&mut self, from: (f64, f64), to: (f64, f64), dashes: &str) {
        let ((x1, y1), (x2, y2)) = (self.point(from.0, from.1), self.point(to.0, to.1));
        self.put(&format!(
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"currentColor\" stroke-width=\"1\" stroke-dasharray=\"{dashes}\"/>"
        ));
    }

    /// Returns the SVG. It has no empty line, because that would end the HTML block in Markdown.
    pub(crate) fn finish(self, about: &About<'_>) -> String {
        let Canvas { tall, mark, size: (width, height), body } = self;
        let About { title, description, data: (data, value), patterns } = about;
        let shape = if tall { "narrow" } else { "wide" };
        let mut defs = String::new();
        for (name, pattern) in *patterns {
            let written = writeln!(defs, "<pattern id=\"{mark}-{name}\" {pattern}</pattern>");
            written.expect("a string takes what is written to it");
        }
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"drawing {shape}\" viewBox=\"0 0 {width} {height}\" role=\"img\" \
             aria-labelledby=\"{mark}-title {mark}-desc\" font-family=\"sans-serif\" font-size=\"{LETTERS}\" fill=\"currentColor\" \
             {data}=\"{value}\">\n\
             <title id=\"{mark}-title\">{title}</title>\n<desc id=\"{mark}-desc\">{description}</desc>\n\
             <defs>\n{defs}</defs>\n{body}</svg>\n"
        )
    }
}
