//! Where branches end side by side: other layers' outputs joined channel by channel, with the pool that follows. The
//! layer has no tensors.

use super::places;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pool {
    Max {
        kernel: usize,
        stride: usize,
        padding: usize,
    },
    /// Of all that lies under the window, the padding's zeros included.
    WindowAverage {
        kernel: usize,
        stride: usize,
        padding: usize,
    },
    /// Over the whole image.
    Average,
}

impl Pool {
    /// Rows and columns that it leaves of so many.
    pub fn output(self, (height, width): (usize, usize)) -> (usize, usize) {
        match self {
            Pool::Average => (1, 1),
            Pool::Max { kernel, stride, padding } | Pool::WindowAverage { kernel, stride, padding } => {
                (places(height, kernel, stride, padding), places(width, kernel, stride, padding))
            }
        }
    }
}

/// Other layers' outputs side by side, and a pool of them. Of one output it is the pool alone.
#[derive(Clone, Debug, PartialEq)]
pub struct JoinSpec {
    /// Rows and columns of the images that it takes: all have the same.
    pub image: (usize, usize),
    /// Channels of each.
    pub channels: Vec<usize>,
    pub pool: Option<Pool>,
    pub dropout: f32,
}

impl JoinSpec {
    /// Channels of all together.
    pub fn outputs(&self) -> usize {
        self.channels.iter().sum()
    }

    /// Rows, columns and channels of what it hands on.
    pub fn output(&self) -> (usize, usize, usize) {
        let (height, width) = self.pool.map_or(self.image, |pool| pool.output(self.image));
        (height, width, self.outputs())
    }

    /// Pixels of one sample as they come, and as they go on.
    pub fn pixels(&self) -> usize {
        self.image.0 * self.image.1
    }

    pub fn output_pixels(&self) -> usize {
        let (height, width, _) = self.output();
        height * width
    }

    pub fn output_elements(&self) -> usize {
        self.output_pixels() * self.outputs()
    }

    pub fn takes_maxima(&self) -> bool {
        matches!(self.pool, Some(Pool::Max { .. }))
    }
}
