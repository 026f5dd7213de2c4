//! A step of each pipeline schedule: the programs of four stages (`shardwise_plan::program`), simulated with free links.
//!
//! A stage computes 1 s forward and 2 s backward per micro-batch. Its chunks share that time, so all drawings show the same work on
//! the same scale, and differ in the waits.

use shardwise_plan::pipeline::{Action, Actions, Pass, Pipeline, PipelineSchedule};
use shardwise_plan::program::{
    Costs, Instruction, Lane, LinkCost, Policy, SharedLink, Span, Topology, UnitCost, UnitSpec, build, simulate,
};
use shardwise_plan::{Axis, Mesh};

use crate::canvas::{About, Canvas, Fill, LETTERS};

const STAGES: usize = 4;
const MICRO_BATCHES: usize = 8;

/// Lighter and darker patterns: those of a stage's first and second chunk.
const PATTERNS: [(&str, &str); 4] = [
    (
        "lines",
        "width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
         <rect width=\"6\" height=\"6\" fill=\"#e69f00\" fill-opacity=\"0.14\"/>\
         <rect width=\"1.2\" height=\"6\" fill=\"#e69f00\" fill-opacity=\"0.45\"/>",
    ),
    (
        "lines-dark",
        "width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
         <rect width=\"6\" height=\"6\" fill=\"#e69f00\" fill-opacity=\"0.5\"/>\
         <rect width=\"1.2\" height=\"6\" fill=\"#e69f00\" fill-opacity=\"0.6\"/>",
    ),
    (
        "dots",
        "width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\">\
         <rect width=\"5\" height=\"5\" fill=\"#00a87c\" fill-opacity=\"0.14\"/>\
         <circle cx=\"2.5\" cy=\"2.5\" r=\"0.9\" fill=\"#00a87c\" fill-opacity=\"0.6\"/>",
    ),
    (
        "dots-dark",
        "width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\">\
         <rect width=\"5\" height=\"5\" fill=\"#00a87c\" fill-opacity=\"0.5\"/>\
         <circle cx=\"2.5\" cy=\"2.5\" r=\"0.9\" fill=\"#00a87c\" fill-opacity=\"0.8\"/>",
    ),
];

/// All drawings with their file names.
pub(crate) fn drawings() -> Vec<(String, String)> {
    let steps: Vec<PipelineStep> = PipelineSchedule::BUILT_IN.into_iter().map(PipelineStep::new).collect();
    let longest_s = steps.iter().map(|step| step.step_s).fold(0., f64::max);
    let draw = |step: &PipelineStep, tall: bool| {
        let name = format!("pipeline-{}-{}.svg", step.pipeline.schedule.name(), if tall { "narrow" } else { "wide" });
        (name, Sheet::new(step, tall, longest_s).draw())
    };
    steps.iter().flat_map(|step| [draw(step, false), draw(step, true)]).collect()
}

/// A pass of a chunk, and its time.
struct Cell {
    action: Action,
    start_s: f64,
    end_s: f64,
}

/// The simulated step of a schedule.
struct PipelineStep {
    pipeline: Pipeline,
    step_s: f64,
    /// By stage.
    cells: Vec<Vec<Cell>>,
}

impl PipelineStep {
    fn new(schedule: PipelineSchedule) -> Self {
        // Each chunk is one unit, so units and chunks have the same numbers.
        let chunks = schedule.chunks(STAGES);
        let units: Vec<UnitSpec> = (0..chunks).map(|chunk| UnitSpec::new(&format!("block.{chunk}"), 1, true)).collect();
        let policy = Policy::stage(0, MICRO_BATCHES);
        let pipeline = Pipeline::even(chunks, STAGES, schedule).expect("there are as many units as chunks");
        let programs = build::pipeline_step(&units, &policy, &pipeline).expect("no units are tied");
        let step = simulate(&programs, &units, &policy, &topology(), &costs(&units));
        let cells_of = |stage: usize| {
            let computed = step.programs[stage].timeline.iter().filter(|span| span.lane == Lane::Compute);
            let cell = |span: &Span| Cell {
                action: action_of(&programs.stages[stage].instructions[span.position]),
                start_s: span.start_s,
                end_s: span.end_s,
            };
            computed.map(cell).collect()
        };
        PipelineStep { cells: (0..STAGES).map(cells_of).collect(), step_s: step.step_s, pipeline }
    }

    fn chunks_per_stage(&self) -> usize {
        self.pipeline.chunks.len() / STAGES
    }

    /// The chunks of a stage, in the model's order.
    fn chunks_of(&self, stage: usize) -> Vec<usize> {
        (0..self.pipeline.chunks.len()).filter(|&chunk| self.pipeline.stage_of_chunk(chunk) == stage).collect()
    }

    /// The passes, and what they are called.
    fn legend(&self) -> Vec<(Pass, &'static str)> {
        let forward = (Pass::Forward, "forward pass");
        let is_split = self.cells.iter().flatten().any(|cell| cell.action.pass == Pass::BackwardWeight);
        if !is_split {
            return vec![forward, (Pass::Backward, "backward pass")];
        }
        let input = (Pass::BackwardInput, "backward: gradient of the input");
        vec![forward, input, (Pass::BackwardWeight, "backward: gradients of the parameters")]
    }

    /// What is drawn, as a schedule.
    fn actions(&self) -> Actions {
        let actions = |cells: &Vec<Cell>| cells.iter().map(|cell| cell.action).collect();
        Actions { stages: self.cells.iter().map(actions).collect() }
    }
}

fn action_of(instruction: &Instruction) -> Action {
    match *instruction {
        Instruction::Forward { unit, micro_batch, .. } => Action::forward(unit, micro_batch),
        Instruction::Backward { unit, micro_batch } => Action::backward(unit, micro_batch),
        Instruction::BackwardInput { unit, micro_batch } => Action::backward_input(unit, micro_batch),
        Instruction::BackwardWeight { unit, micro_batch } => Action::backward_weight(unit, micro_batch),
        _ => unreachable!("only passes take time: {instruction:?}"),
    }
}

fn costs(units: &[UnitSpec]) -> Costs {
    let stage_share = STAGES as f64 / units.len() as f64;
    let cost = |unit: &UnitSpec| UnitCost {
        name: unit.name.clone(),
        forward_s: stage_share,
        backward_s: 2. * stage_share,
        ..UnitCost::default()
    };
    Costs {
        units: units.iter().map(cost).collect(),
        links: Costs::free_links_except(&[]),
        tiers: [LinkCost::FREE; 2],
        optimizer_element_bytes: 8,
    }
}

/// One rank per stage, each on its own host.
fn topology() -> Topology {
    Topology {
        mesh: Mesh::new(&[(Axis::Pipeline, STAGES)]).expect("a mesh of one axis"),
        ranks_per_host: 1,
        cores_per_host: 1,
        threads_per_rank: 1,
        within_host: SharedLink::unshared(LinkCost::FREE),
        between_hosts: SharedLink::unshared(LinkCost::FREE),
        parameter_bytes: 4,
        gradient_bytes: 4,
    }
}

fn fill_of(pass: Pass, is_second_chunk: bool) -> Fill {
    match (pass, is_second_chunk) {
        (Pass::Forward, false) => Fill::Plain("#2b8cd6", 0.14),
        (Pass::Forward, true) => Fill::Plain("#2b8cd6", 0.55),
        (Pass::Backward | Pass::BackwardInput, false) => Fill::Pattern("lines"),
        (Pass::Backward | Pass::BackwardInput, true) => Fill::Pattern("lines-dark"),
        (Pass::BackwardWeight, false) => Fill::Pattern("dots"),
        (Pass::BackwardWeight, true) => Fill::Pattern("dots-dark"),
    }
}

/// The layout of a drawing: one lane per stage.
struct Sheet<'a> {
    step: &'a PipelineStep,
    canvas: Canvas,
    start: f64,
    per_time: f64,
}

/// The size of a lane across the time axis, and the distance from one to the next.
const WIDE_LANE: (f64, f64) = (28., 35.);
const TALL_LANE: (f64, f64) = (72., 82.);

/// The distance from the end of the step to the legend in a narrow window, and from one line of the legend to the next.
const LEGEND_DISTANCE: f64 = 22.;
const LEGEND_LINE: f64 = 18.;

impl<'a> Sheet<'a> {
    fn new(step: &'a PipelineStep, tall: bool, longest_s: f64) -> Self {
        let (start, length) = if tall { (36., 825.) } else { (92., 650.) };
        let per_time = length / longest_s;
        let legend_lines = step.legend().len() + step.chunks_per_stage();
        let size = match tall {
            // A shorter step leaves no empty space below it.
            true => {
                (360., (start + step.step_s * per_time + LEGEND_DISTANCE + LEGEND_LINE * legend_lines as f64).ceil())
            }
            false => (750., 190.),
        };
        let canvas = Canvas::new(&format!("p-{}", step.pipeline.schedule.name()), tall, size);
        Sheet { step, canvas, start, per_time }
    }

    fn at(&self, time: f64) -> f64 {
        self.start + time * self.per_time
    }

    fn lane(&self, stage: usize) -> (f64, f64) {
        let (first, (size, distance)) = if self.canvas.tall { (21., TALL_LANE) } else { (8., WIDE_LANE) };
        let from = first + stage as f64 * distance;
        (from, from + size)
    }

    fn draw(mut self) -> String {
        for stage in 0..STAGES {
            self.name(stage);
            self.passes(stage);
        }
        self.legend();
        let schedule = &self.step.pipeline.schedule;
        let actions = self.step.actions().to_string().lines().collect::<Vec<_>>().join(";");
        let same = "Time runs along the drawing, with a lane per stage and the numbers of micro-batches.";
        self.canvas.finish(&About {
            title: &format!("One step of {}", schedule.name()),
            description: &format!("{} {same}", describe(schedule)),
            data: ("data-actions", &actions),
            patterns: &PATTERNS,
        })
    }

    /// Draws the name of a stage, and its chunks if there are several.
    fn name(&mut self, stage: usize) {
        let (from, to) = self.lane(stage);
        let middle = (from + to) / 2.;
        let mut lines = vec![format!("stage {stage}")];
        if self.step.chunks_per_stage() > 1 {
            let chunks: Vec<String> = self.step.chunks_of(stage).iter().map(usize::to_string).collect();
            lines.push(format!("chunks {}", chunks.join(", ")));
        }
        let above = 14. * (lines.len() - 1) as f64;
        for (index, line) in lines.iter().enumerate() {
            let below = 14. * index as f64;
            match self.canvas.tall {
                true => self.canvas.words((middle, self.start - 8. - above + below), "middle", line),
                false => self.canvas.words((self.start - 10., middle + 4. - above / 2. + below), "end", line),
            }
        }
    }

    /// Draws the passes of a stage, and its waits.
    fn passes(&mut self, stage: usize) {
        let (lane, second) = (self.lane(stage), self.step.chunks_of(stage).get(1).copied());
        let mut reached_s = 0.;
        for cell in &self.step.cells[stage] {
            self.wait(lane, reached_s, cell.start_s);
            let along = (self.at(cell.start_s), self.at(cell.end_s));
            let fill = fill_of(cell.action.pass, second == Some(cell.action.chunk));
            let number = cell.action.micro_batch.to_string();
            if along.1 - along.0 > 1.2 * LETTERS {
                self.canvas.labelled(along, lane, fill, &number);
            } else {
                self.canvas.rectangle(along, lane, fill);
                self.canvas.small_words((along.0 + along.1) / 2., (lane.0 + lane.1) / 2., &number);
            }
            reached_s = cell.end_s;
        }
        self.wait(lane, reached_s, self.step.step_s);
    }

    fn wait(&mut self, (from, to): (f64, f64), start_s: f64, end_s: f64) {
        if end_s - start_s > 1e-6 {
            let across = (from + to) / 2.;
            self.canvas.line((self.at(start_s) + 2., across), (self.at(end_s) - 2., across), "1 4");
        }
    }

    fn legend(&mut self) {
        let tall = self.canvas.tall;
        let left = if tall { 21. } else { self.start };
        let first = if tall { self.at(self.step.step_s) + LEGEND_DISTANCE } else { 162. };
        let (mut x, mut y) = (left, first);
        for (pass, text) in self.step.legend() {
            self.canvas.entry((x, y), fill_of(pass, false), text);
            match tall {
                true => y += LEGEND_LINE,
                // The width of the text, roughly.
                false => x += 44. + 6. * text.len() as f64,
            }
        }
        (x, y) = if tall { (left, y) } else { (left, y + LEGEND_LINE) };
        if self.step.chunks_per_stage() > 1 {
            self.canvas.entry((x, y), fill_of(Pass::Forward, true), "strong colors: second chunk");
            (x, y) = if tall { (x, y + LEGEND_LINE) } else { (x + 206., y) };
        }
        self.canvas.words((x, y), "start", "0–7: micro-batches; dotted: idle");
    }
}

fn describe(schedule: &PipelineSchedule) -> &'static str {
    match schedule {
        PipelineSchedule::GPipe => {
            "All stages run the forward passes of all micro-batches, and then all backward passes. Every stage waits for three \
             forward and three backward passes of other stages."
        }
        PipelineSchedule::OneFOneB => {
            "Each stage runs the backward pass of a micro-batch as early as it can, and then the next forward pass. Stages wait as \
             long as with GPipe, but the first stage has at most four micro-batches in flight, and the last stage one."
        }
        PipelineSchedule::Interleaved1F1B { .. } => {
            "Every stage has two chunks, and works on four micro-batches with one before it turns to the other. Stages wait half as \
             long as with 1F1B."
        }
        PipelineSchedule::ZeroBubbleH1 => {
            "The backward pass is split. Stages compute gradients of inputs early, because the previous stage waits for them, and fill \
             most of the waiting time with gradients of parameters."
        }
        PipelineSchedule::ZeroBubbleV => {
            "The chunks lead from the first stage to the last and back. From its first pass to its last, no stage ever waits."
        }
        PipelineSchedule::LoopedBreadthFirst { .. } => {
            "Every stage runs the forward passes of all micro-batches with one chunk, then with the other, and the backward passes \
             in reverse order of chunks."
        }
        PipelineSchedule::Custom(_) => "An order from a file.",
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]

    use super::*;

    #[test]
    fn drawings_show_every_action_of_the_schedule_in_order() {
        for step in PipelineSchedule::BUILT_IN.into_iter().map(PipelineStep::new) {
            assert_eq!(step.actions(), step.pipeline.actions(MICRO_BATCHES).unwrap(), "{}", step.pipeline.schedule);
        }
    }

    /// As in the guide's table, as a share of the time that a stage computes.
    #[test]
    fn stages_wait_as_long_as_the_guide_says() {
        let (p, m) = (STAGES as f64, MICRO_BATCHES as f64);
        let one = (p - 1.) / m;
        let expected = [one, one, one / 2., one / 3., 0., one / 2.];
        for (step, expected) in PipelineSchedule::BUILT_IN.into_iter().map(PipelineStep::new).zip(expected) {
            let bubble = |cells: &Vec<Cell>| {
                let busy_s: f64 = cells.iter().map(|cell| cell.end_s - cell.start_s).sum();
                assert_eq!(busy_s, 3. * m);
                (cells[cells.len() - 1].end_s - cells[0].start_s - busy_s) / busy_s
            };
            let most = step.cells.iter().map(bubble).fold(0., f64::max);
            assert!((most - expected).abs() < 1e-9, "{}: {most} instead of {expected}", step.pipeline.schedule);
            // The first stage starts first and ends last, except in zb-v, whose last stage starts p − 1 passes later.
            let late_s = if step.pipeline.schedule == PipelineSchedule::ZeroBubbleV { (p - 1.) / 2. } else { 0. };
            assert!((step.step_s - 3. * m * (1. + expected) - late_s).abs() < 1e-9, "{}", step.step_s);
        }
    }
}
