//! What computing and sending costs: the times and bytes that a simulation needs besides the program.
//!
//! Costs print as text, one line per link and unit, and parse back, so that they can be kept, compared and edited. Links of other
//! groups and of tiers (`tier host …`) are free unless they have a line.
//!
//! ```text
//! optimizer element_bytes=8
//! link world latency_s=0.00002 bytes_per_s=1000000000
//! link shard latency_s=0.00002 bytes_per_s=1000000000
//! link replicate latency_s=0.00002 bytes_per_s=1000000000
//! unit embedding forward_s=0.001 backward_s=0.002 update_s=0.001 norm_s=0.0001 kept_bytes=4096 selective_bytes=4096 …
//! ```

use std::fmt;
use std::str::FromStr;

use super::groups::GroupKind;
use super::text::ParseError;
use super::tier::Tier;

/// What a step costs on one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// The units, in the model's order.
    pub units: Vec<UnitCost>,
    /// The links, in the order of [`GroupKind::ALL`].
    pub links: [LinkCost; GroupKind::ALL.len()],
    /// The links to memory outside the device, in the order of [`Tier::ALL`].
    pub tiers: [LinkCost; Tier::ALL.len()],
    /// The bytes of masters and optimizer state per trainable element.
    pub optimizer_element_bytes: usize,
}

/// What a unit costs per micro-batch, and in the update.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UnitCost {
    /// The unit's name.
    pub name: String,
    /// The time of a forward pass, and of recomputing it.
    pub forward_s: f64,
    /// The time of a backward pass, without recomputation.
    pub backward_s: f64,
    /// The time to update what this rank updates.
    pub update_s: f64,
    /// The time of the norm of this rank's share of the gradients.
    pub norm_s: f64,
    /// The activations that a forward pass keeps, including its output.
    pub kept_bytes: usize,
    /// The activations that a forward pass keeps with selective checkpointing, including its output.
    pub selective_bytes: usize,
    /// The output alone.
    pub output_bytes: usize,
    /// The peak of the temporary memory of a forward pass that keeps all activations.
    pub forward_temporary_bytes: usize,
    /// The same with selective checkpointing.
    pub selective_forward_temporary_bytes: usize,
    /// The same if the forward pass keeps nothing but its output.
    pub no_grad_temporary_bytes: usize,
    /// The most that a backward pass holds in addition to what was held before it.
    pub temporary_bytes: usize,
    /// The same with selective checkpointing, whose backward pass also recomputes.
    pub selective_temporary_bytes: usize,
    /// The gradient that a backward pass returns for the parameter of another unit, which this unit is tied to.
    pub tied_gradient_bytes: usize,
    /// The part of the unit's gradients that a backward pass does not return, because they are sparse.
    pub sparse_gradient_bytes: usize,
}

/// What a collective costs in one kind of group. A group of one rank costs nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkCost {
    /// The time of the smallest call.
    pub latency_s: f64,
    /// The bytes per second that a rank sends in a large call; may be infinite.
    pub bytes_per_s: f64,
    /// The CPU time per byte that the rank's communication thread takes from its computation, because cores are scarce.
    pub cpu_s_per_byte: f64,
}

impl LinkCost {
    /// A link that takes no time.
    pub const FREE: LinkCost = LinkCost::new(0., f64::INFINITY);

    /// A link that takes no CPU time from computation.
    pub const fn new(latency_s: f64, bytes_per_s: f64) -> Self {
        LinkCost { latency_s, bytes_per_s, cpu_s_per_byte: 0. }
    }

    /// The time to send this many bytes.
    pub fn duration_s(&self, bytes: usize) -> f64 {
        self.latency_s + bytes as f64 / self.bytes_per_s
    }
}

impl Costs {
    /// Links for [`Costs::links`] that are free, except those of some kinds of groups.
    pub fn free_links_except(given: &[(GroupKind, LinkCost)]) -> [LinkCost; GroupKind::ALL.len()] {
        let mut links = [LinkCost::FREE; GroupKind::ALL.len()];
        given.iter().for_each(|&(group, link)| links[group as usize] = link);
        links
    }

    /// The link of one kind of group.
    pub fn link(&self, group: GroupKind) -> &LinkCost {
        &self.links[group as usize]
    }
}

impl fmt::Display for Costs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "optimizer element_bytes={}", self.optimizer_element_bytes)?;
        for group in GroupKind::ALL {
            write_link(f, "link", group.name(), self.link(group), is_required(group))?;
        }
        for tier in Tier::ALL {
            write_link(f, "tier", tier.name(), &self.tiers[tier as usize], false)?;
        }
        for unit in &self.units {
            let UnitCost { name, forward_s, backward_s, update_s, norm_s, .. } = unit;
            write!(
                f,
                "unit {name} forward_s={forward_s} backward_s={backward_s} update_s={update_s} norm_s={norm_s} "
            )?;
            let bytes: Vec<String> = BYTES.iter().map(|(key, of)| format!("{key}={}", of(&mut unit.clone()))).collect();
            writeln!(f, "{}", bytes.join(" "))?;
        }
        Ok(())
    }
}

/// Whether the text of costs must have a line for this kind of group. Other links are free if they have none.
fn is_required(group: GroupKind) -> bool {
    matches!(group, GroupKind::World | GroupKind::Shard | GroupKind::Replicate)
}

fn write_link(f: &mut fmt::Formatter<'_>, word: &str, name: &str, link: &LinkCost, is_required: bool) -> fmt::Result {
    let LinkCost { latency_s, bytes_per_s, cpu_s_per_byte } = link;
    if !is_required && *link == LinkCost::FREE {
        return Ok(());
    }
    write!(f, "{word} {name} latency_s={latency_s} bytes_per_s={bytes_per_s}")?;
    if *cpu_s_per_byte > 0. {
        write!(f, " cpu_s_per_byte={cpu_s_per_byte}")?;
    }
    writeln!(f)
}

impl FromStr for Costs {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let mut units = Vec::new();
        let mut links = [None; GroupKind::ALL.len()];
        let mut tiers = [LinkCost::FREE; Tier::ALL.len()];
        let mut optimizer_element_bytes = None;
        for (index, line) in text.lines().enumerate() {
            let fail = |problem: String| ParseError { line: index + 1, problem };
            let words: Vec<&str> = line.split('#').next().unwrap_or_default().split_whitespace().collect();
            match words[..] {
                [] => (),
                ["optimizer", ref fields @ ..] => {
                    let mut fields = Fields::parse(fields).map_err(fail)?;
                    optimizer_element_bytes = Some(fields.bytes("element_bytes").map_err(fail)?);
                    fields.finish().map_err(fail)?;
                }
                ["link", name, ref fields @ ..] => {
                    let group = GroupKind::ALL.into_iter().find(|group| group.name() == name);
                    let group = group.ok_or_else(|| fail(format!("there is no group '{name}'")))?;
                    links[group as usize] = Some(parse_link(fields).map_err(fail)?);
                }
                ["tier", name, ref fields @ ..] => {
                    let tier = Tier::ALL.into_iter().find(|tier| tier.name() == name);
                    let tier = tier.ok_or_else(|| fail(format!("there is no tier '{name}'")))?;
                    tiers[tier as usize] = parse_link(fields).map_err(fail)?;
                }
                ["unit", name, ref fields @ ..] => units.push(parse_unit(name, fields).map_err(fail)?),
                [first, ..] => return Err(fail(format!("'{first}' is not optimizer, link, tier or unit"))),
            }
        }
        let end = text.lines().count().max(1);
        let missing = |what: String| ParseError { line: end, problem: format!("the line '{what} …' is missing") };
        let optimizer_element_bytes = optimizer_element_bytes.ok_or_else(|| missing("optimizer".to_string()))?;
        let is_missing = |group: &GroupKind| is_required(*group) && links[*group as usize].is_none();
        if let Some(group) = GroupKind::ALL.into_iter().find(is_missing) {
            return Err(missing(format!("link {}", group.name())));
        }
        let links = links.map(|link| link.unwrap_or(LinkCost::FREE));
        Ok(Costs { units, links, tiers, optimizer_element_bytes })
    }
}

/// A field of a unit's costs.
type BytesField = fn(&mut UnitCost) -> &mut usize;

/// The bytes of a unit, by key.
const BYTES: [(&str, BytesField); 10] = [
    ("kept_bytes", |unit| &mut unit.kept_bytes),
    ("selective_bytes", |unit| &mut unit.selective_bytes),
    ("output_bytes", |unit| &mut unit.output_bytes),
    ("forward_temporary_bytes", |unit| &mut unit.forward_temporary_bytes),
    ("selective_forward_temporary_bytes", |unit| &mut unit.selective_forward_temporary_bytes),
    ("no_grad_temporary_bytes", |unit| &mut unit.no_grad_temporary_bytes),
    ("temporary_bytes", |unit| &mut unit.temporary_bytes),
    ("selective_temporary_bytes", |unit| &mut unit.selective_temporary_bytes),
    ("tied_gradient_bytes", |unit| &mut unit.tied_gradient_bytes),
    ("sparse_gradient_bytes", |unit| &mut unit.sparse_gradient_bytes),
];

fn parse_link(fields: &[&str]) -> Result<LinkCost, String> {
    let mut fields = Fields::parse(fields)?;
    let cpu_s_per_byte = if fields.has("cpu_s_per_byte") { fields.seconds("cpu_s_per_byte")? } else { 0. };
    let (latency_s, bytes_per_s) = (fields.seconds("latency_s")?, fields.number("bytes_per_s")?);
    let link = LinkCost { latency_s, bytes_per_s, cpu_s_per_byte };
    if link.bytes_per_s <= 0. {
        return Err("bytes_per_s must be more than 0".to_string());
    }
    fields.finish()?;
    Ok(link)
}

fn parse_unit(name: &str, fields: &[&str]) -> Result<UnitCost, String> {
    let mut fields = Fields::parse(fields)?;
    let mut unit = UnitCost {
        name: name.to_string(),
        forward_s: fields.seconds("forward_s")?,
        backward_s: fields.seconds("backward_s")?,
        update_s: fields.seconds("update_s")?,
        norm_s: fields.seconds("norm_s")?,
        ..UnitCost::default()
    };
    for (key, of) in BYTES {
        *of(&mut unit) = fields.bytes(key)?;
    }
    fields.finish()?;
    Ok(unit)
}

/// The `key=value` words of a line.
struct Fields<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Fields<'a> {
    fn parse(words: &[&'a str]) -> Result<Self, String> {
        let pair = |word: &'a str| word.split_once('=').ok_or_else(|| format!("'{word}' is not key=value"));
        Ok(Fields(words.iter().copied().map(pair).collect::<Result<_, _>>()?))
    }

    fn has(&self, key: &str) -> bool {
        self.0.iter().any(|(found, _)| *found == key)
    }

    fn take(&mut self, key: &str) -> Result<&'a str, String> {
        let index = self.0.iter().position(|(found, _)| *found == key).ok_or_else(|| format!("{key}=… is missing"))?;
        Ok(self.0.remove(index).1)
    }

    fn bytes(&mut self, key: &str) -> Result<usize, String> {
        let value = self.take(key)?;
        value.parse().map_err(|_| format!("{key}={value} is not a number of bytes"))
    }

    /// A number that is not NaN or negative.
    fn number(&mut self, key: &str) -> Result<f64, String> {
        let value = self.take(key)?;
        let number = value.parse::<f64>().ok().filter(|&number| number >= 0.);
        number.ok_or_else(|| format!("{key}={value} is not a number of at least 0"))
    }

    fn seconds(&mut self, key: &str) -> Result<f64, String> {
        let seconds = self.number(key)?;
        if seconds.is_finite() { Ok(seconds) } else { Err(format!("{key} must be finite")) }
    }

    /// Fails if there are fields that nobody took.
    fn finish(&self) -> Result<(), String> {
        match self.0.first() {
            Some((key, _)) => Err(format!("{key} is unknown, or given twice")),
            None => Ok(()),
        }
    }
}
