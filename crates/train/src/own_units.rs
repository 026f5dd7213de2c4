//! The units of the model that this rank holds: all of them, or those of its stage of the pipeline.

use std::ops::{Index, IndexMut};

use shardwise_zero::ShardedUnit;

/// The units of the model that this rank holds, by their index in the model.
pub(crate) struct OwnUnits {
    units: Vec<Option<ShardedUnit>>,
}

impl OwnUnits {
    /// One entry for each unit of the model; `None` for those on other stages.
    pub(crate) fn new(units: Vec<Option<ShardedUnit>>) -> Self {
        OwnUnits { units }
    }

    /// The number of units of the model.
    pub(crate) fn model_len(&self) -> usize {
        self.units.len()
    }

    /// Whether this rank holds a unit.
    pub(crate) fn has(&self, unit: usize) -> bool {
        self.units[unit].is_some()
    }

    /// A unit, if this rank holds it.
    pub(crate) fn get(&self, unit: usize) -> Option<&ShardedUnit> {
        self.units[unit].as_ref()
    }

    /// The units with their indices, in the model's order.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = (usize, &ShardedUnit)> {
        self.units.iter().enumerate().filter_map(|(index, unit)| Some((index, unit.as_ref()?)))
    }

    /// The units with their indices, in the model's order.
    pub(crate) fn iter_mut(&mut self) -> impl DoubleEndedIterator<Item = (usize, &mut ShardedUnit)> {
        self.units.iter_mut().enumerate().filter_map(|(index, unit)| Some((index, unit.as_mut()?)))
    }
}

impl Index<usize> for OwnUnits {
    type Output = ShardedUnit;

    /// # Panics
    /// If the unit is on another stage.
    fn index(&self, unit: usize) -> &ShardedUnit {
        self.units[unit].as_ref().unwrap_or_else(|| panic!("unit {unit} is on another stage of the pipeline"))
    }
}

impl IndexMut<usize> for OwnUnits {
    fn index_mut(&mut self, unit: usize) -> &mut ShardedUnit {
        self.units[unit].as_mut().unwrap_or_else(|| panic!("unit {unit} is on another stage of the pipeline"))
    }
}
