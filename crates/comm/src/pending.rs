//! A call under way.

use std::any::Any;
use std::marker::PhantomData;
use std::time::Instant;

use crate::instruments::Ticket;
use crate::{Error, Result};

/// The buffers of a call, with their type erased while they are under way.
pub(crate) type Luggage = Box<dyn Any + Send>;

/// How a back end says that a call is done: called once, it blocks until then.
pub(crate) type Completion = Box<dyn FnOnce() -> Result<Luggage> + Send>;

/// A call under way that will give back its buffers.
///
/// Dropping it does not stop the call; the buffers are then dropped when it is done.
#[must_use = "the call is under way; wait() gives the buffers back and says whether it succeeded"]
pub struct Pending<T> {
    completion: Completion,
    /// Of a call that was started.
    ticket: Option<Ticket>,
    buffers: PhantomData<fn() -> T>,
}

impl<T: 'static> Pending<T> {
    /// # Panics
    /// In `wait`, if the completion's luggage is not a `T`.
    pub(crate) fn new(completion: Completion, ticket: Ticket) -> Self {
        Pending { completion, ticket: Some(ticket), buffers: PhantomData }
    }

    /// A call that failed before it started.
    pub(crate) fn failed(error: Error) -> Self {
        Pending { completion: Box::new(move || Err(error)), ticket: None, buffers: PhantomData }
    }

    /// A call that was over before it began.
    pub(crate) fn done(buffers: T) -> Self
    where
        T: Send,
    {
        let luggage: Luggage = Box::new(buffers);
        Pending { completion: Box::new(move || Ok(luggage)), ticket: None, buffers: PhantomData }
    }

    /// Blocks until the call is done, and gives the buffers back.
    ///
    /// After an error the buffers are gone: the network may still write to them.
    pub fn wait(self) -> Result<T> {
        let began = Instant::now();
        let luggage = (self.completion)();
        if let Some(ticket) = self.ticket {
            ticket.waited(began.elapsed());
        }
        let luggage = luggage?;
        Ok(*luggage.downcast::<T>().expect("a call gives back the buffers that it was given"))
    }
}
