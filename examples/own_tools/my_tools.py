"""Three tools over a small shop. `sharpen data build --tools` really executes them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sharpen import tool

STOCK = {"tea": 12, "coffee": 0, "cocoa": 30, "honey": 7, "salt": 90, "rice": 41}
PRICES = {"tea": 4.2, "coffee": 7.9, "cocoa": 5.5, "honey": 6.0, "salt": 0.9, "rice": 2.3}
Product = Annotated[str, Field(examples=list(STOCK))]


@tool
def check_stock(product: Product) -> dict:
    """Tells how many pieces of a product are on the shelf.

    Args:
        product: name of the product
    """
    return {"product": product, "pieces": STOCK[product]}


@tool
def quote_price(
    product: Product,
    quantity: Annotated[int, Field(ge=1, le=200)],
    currency: Literal["EUR", "USD"] = "EUR",
) -> dict:
    """Works out what a number of pieces costs.

    Args:
        product: name of the product
        quantity: number of pieces
        currency: currency of the answer
    """
    rate = {"EUR": 1.0, "USD": 1.08}[currency]
    return {"total": round(PRICES[product] * quantity * rate, 2), "currency": currency}


@tool
def plan_delivery(
    city: str, date: Annotated[str, Field(json_schema_extra={"format": "date"})]
) -> dict:
    """Finds the van that drives to a city on a day.

    Args:
        city: city of the customer
        date: day of the delivery
    """
    return {"van": 1 + sum(map(ord, city)) % 4, "city": city, "date": date}
